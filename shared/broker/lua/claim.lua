-- Take over the oldest unfinished request of a tokenizer that is dead, with the number of times it was delivered.
-- KEYS tokenize ; ARGV group dead me
local pending = call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2])[1]
if not pending then return nil end
local id = pending[1]
local entry = call('XRANGE', KEYS[1], id, id)[1]
if not entry then                             -- deleted while pending: older servers keep its id for ever
  call('XACK', KEYS[1], ARGV[1], id)
  return nil
end
call('XCLAIM', KEYS[1], ARGV[1], ARGV[3], 0, id)
return {entry[1], entry[2], pending[4] + 1}
