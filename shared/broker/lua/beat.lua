-- Write my heartbeat and look at everybody's: a look counts only together with a write that was accepted.
-- KEYS generate alive_mine alive.. ; ARGV incarnation heartbeat ttl
call('PEXPIRE', KEYS[1], ARGV[3])             -- first: a write that a full memory allows lets the beat pass
call('HSET', KEYS[2], ARGV[1], ARGV[2])
local out = {}
for i = 3, #KEYS do out[i - 2] = call('HGETALL', KEYS[i]) end
return out
