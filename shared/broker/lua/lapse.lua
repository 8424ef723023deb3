-- Look at the streams that are due: one past its deadline is ended, one that nobody has come back to is removed with
-- its logs, and of one that is over the logs live out their time. Answers how many were abandoned, and were late.
-- KEYS streams ; ARGV limit stream_prefix reply_prefix abort_prefix late_blob abort_ttl inbox_prefix inbox_cap inbox_ttl
local now, abandoned, late = clock(), 0, 0
for _, member in ipairs(call('ZRANGEBYSCORE', KEYS[1], '-inf', now, 'LIMIT', 0, ARGV[1])) do
  call('ZREM', KEYS[1], member)               -- first: a write that a full memory allows lets the rest pass
  local stream = ARGV[2] .. member
  local uids, life, deadline = unpack(call('HMGET', stream, 'u', 'l', 'd'))
  local is_late, is_open = deadline and deadline ~= '' and now >= tonumber(deadline), false
  for uid in string.gmatch(uids or '', '%S+') do
    local attempt, said, _, id = last(ARGV[3] .. uid)
    if attempt and attempt ~= END then
      is_open = true
      if is_late then
        terminate(ARGV[3] .. uid, ARGV[4] .. uid, uid, said, id, ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9])
      end
    end
  end
  if is_open and not is_late then
    for uid in string.gmatch(uids, '%S+') do
      call('DEL', ARGV[3] .. uid)
      call('SET', ARGV[4] .. uid, '1', 'PX', ARGV[6])
    end
    call('DEL', stream)
    abandoned = abandoned + 1
  elseif uids then
    call('PEXPIRE', stream, life)
    late = late + (is_open and 1 or 0)
  end
end
return {abandoned, late}
