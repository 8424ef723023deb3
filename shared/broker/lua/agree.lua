-- Write what the installation has not agreed on yet, and tell what holds.
-- KEYS meta ; ARGV wire_version shards
call('PERSIST', KEYS[1])                      -- first: a write that a full memory allows lets the rest pass
call('HSETNX', KEYS[1], 'wire', ARGV[1])
call('HSETNX', KEYS[1], 'shards', ARGV[2])
return call('HMGET', KEYS[1], 'wire', 'shards')
