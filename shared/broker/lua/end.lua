-- End a uid, whoever asks first: write the terminal, set the doorbell, ring the inbox of its replica.
-- KEYS log abort ; ARGV attempt|'' blob uid abort_ttl inbox_prefix inbox_cap inbox_ttl
local attempt, said, _, id = last(KEYS[1])
if not attempt then return 'GONE' end
if attempt == END then return 'ENDED' end
if ARGV[1] ~= '' and attempt ~= ARGV[1] then return 'FENCED' end
local fields, head = {}, call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1][2]
for i = 1, #head, 2 do fields[head[i]] = head[i + 1] end
call('PEXPIRE', KEYS[1], fields.l)            -- first: a write that a full memory allows lets the rest pass
local final = END .. '-' .. said
call('XADD', KEYS[1], final, 'k', 'e', 't', ARGV[2])
call('SET', KEYS[2], '1', 'PX', ARGV[4])
local inbox = ARGV[5] .. fields.r
call('XADD', inbox, 'MAXLEN', '~', ARGV[6], '*', 'm', array(1) .. ring(ARGV[3], id, final) .. ARGV[2])
call('PEXPIRE', inbox, ARGV[7])
return 'OK'
