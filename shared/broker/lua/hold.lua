-- Say that requests of a limited key are still under way: their places would be free after `life` otherwise.
-- KEYS slots ; ARGV life id..
call('PEXPIRE', KEYS[1], ARGV[1])                          -- first: a write that a full memory allows
local due = now_ms() + ARGV[1]
for i = 2, #ARGV do call('ZADD', KEYS[1], due, ARGV[i]) end
call('PEXPIRE', KEYS[1], ARGV[1])
return #ARGV - 1
