-- Hand a tokenized request to one engine: all of its choices, or none.
-- KEYS tokenize generate alive log.. ; ARGV entry engine group ttl, then per choice: uid payload
if call('HEXISTS', KEYS[3], ARGV[2]) == 0 then return 'NOENGINE' end
local states = {}                             -- all is read before anything is written: a key may be a stranger's
for i = 4, #KEYS do states[i] = last(KEYS[i]) or END end
call('XLEN', KEYS[2])
if call('XDEL', KEYS[1], ARGV[1]) == 0 then return 'DUP' end      -- also the write that a full memory allows
call('XACK', KEYS[1], ARGV[3], ARGV[1])
for i = 4, #KEYS do
  local o = 4 + (i - 4) * 2
  if states[i] ~= END then call('XADD', KEYS[2], '*', 'u', ARGV[o + 1], 'm', ARGV[o + 2]) end
end
call('PEXPIRE', KEYS[2], ARGV[4])
return 'OK'
