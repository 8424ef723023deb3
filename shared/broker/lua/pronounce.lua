-- Mark an instance as ended, for whoever has seen its process end; not if it has said anything since.
-- KEYS alive ; ARGV incarnation beat ended_beat
if call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
