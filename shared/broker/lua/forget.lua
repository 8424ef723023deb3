-- Remove a consumer, but never with what it has pending.
-- KEYS tokenize ; ARGV group consumer
if call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, ARGV[2])[1] then return 0 end
call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], ARGV[2])
return 1
