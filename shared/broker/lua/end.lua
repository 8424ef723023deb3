-- End a uid, whoever asks first: write the terminal, set the doorbell, ring the inbox of its replica.
-- KEYS log abort ; ARGV attempt|'' blob uid abort_ttl inbox_prefix inbox_cap inbox_ttl
local attempt, said, _, id = last(KEYS[1])
if not attempt then return 'GONE' end
if attempt == END then return 'ENDED' end
if ARGV[1] ~= '' and attempt ~= ARGV[1] then return 'FENCED' end
terminate(KEYS[1], KEYS[2], ARGV[3], said, id, ARGV[2], ARGV[4], ARGV[5], ARGV[6], ARGV[7])
return 'OK'
