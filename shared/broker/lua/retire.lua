-- Forget an instance that has said nothing since `beat`, once nothing is left in its stream.
-- KEYS alive generate ; ARGV incarnation beat
if call('XLEN', KEYS[2]) > 0 or call('HGET', KEYS[1], ARGV[1]) ~= ARGV[2] then return 0 end
call('HDEL', KEYS[1], ARGV[1])
call('DEL', KEYS[2])
return 1
