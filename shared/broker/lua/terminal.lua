-- Write the terminal of an open log behind `said` tokens, set the doorbell, ring the inbox of its replica.
local function terminate(log, abort, uid, said, prev, blob, abort_ttl, inboxes, inbox_cap, inbox_ttl)
  local fields, head = {}, call('XRANGE', log, '-', '+', 'COUNT', 1)[1][2]
  for i = 1, #head, 2 do fields[head[i]] = head[i + 1] end
  call('PEXPIRE', log, fields.l)              -- first: a write that a full memory allows lets the rest pass
  local final = END .. '-' .. said
  call('XADD', log, final, 'k', 'e', 't', blob)
  call('SET', abort, '1', 'PX', abort_ttl)
  local inbox = inboxes .. fields.r
  redis.pcall('XADD', inbox, 'MAXLEN', '~', inbox_cap, '*', 'm', array(1) .. ring(uid, prev, final) .. blob)
  call('PEXPIRE', inbox, inbox_ttl)
end
