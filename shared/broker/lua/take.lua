-- Move one entry from the stream of a dead or draining engine to that of another.
-- KEYS source target alive log ; ARGV entry target_engine why ttl
if call('HEXISTS', KEYS[3], ARGV[2]) == 0 then return 'NOENGINE' end
local entry = call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if not entry then return 'NONE' end
local fields = {}
for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
local attempt = last(KEYS[4])
call('XLEN', KEYS[2])                         -- all is read before anything is written: a key may be a stranger's
call('XDEL', KEYS[1], ARGV[1])
if not attempt or attempt == END then return 'DROPPED' end
call('XADD', KEYS[2], '*', 'u', fields.u, 'm', fields.m, 'w', ARGV[3])
call('PEXPIRE', KEYS[2], ARGV[4])
return 'OK'
