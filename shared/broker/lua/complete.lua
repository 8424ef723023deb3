-- A stream has ended and was told to its end: it counts no more, and lives no longer than its life from now on.
-- KEYS stream streams ; ARGV member life
call('ZREM', KEYS[2], ARGV[1])
if call('PTTL', KEYS[1]) > tonumber(ARGV[2]) then call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
