-- Acknowledge and delete, together: neither a pending id without its entry nor an entry nobody will read again.
-- KEYS tokenize ; ARGV group entry
call('XACK', KEYS[1], ARGV[1], ARGV[2])
return call('XDEL', KEYS[1], ARGV[2])
