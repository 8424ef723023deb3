-- Write what one flush says, each item only if its log still ends where the writer thinks it does, and ring the
-- inboxes in the same breath. Answers per item the last id of its log: the item's own id when it is written.
-- KEYS inbox.. log.. (by inbox) ; ARGV inboxes cap inbox_ttl abort_ttl, items per inbox.., per item prev id blob head,
--   per terminal item# ttl generate entry abort
local inboxes = tonumber(ARGV[1])
local o = 4 + inboxes
local ends, out, i = {}, {}, 0
for t = o + 4 * (#KEYS - inboxes) + 1, #ARGV, 5 do ends[tonumber(ARGV[t])] = t end
-- First a write that a full memory allows, which lets the rest pass: what is said here frees more than it takes.
call('PEXPIRE', KEYS[1], ARGV[3])
for b = 1, inboxes do
  local rings, rung = {}, 0
  for _ = 1, tonumber(ARGV[4 + b]) do
    i = i + 1
    local log, prev, id, blob = KEYS[inboxes + i], ARGV[o + 1], ARGV[o + 2], ARGV[o + 3]
    local entry = call('XREVRANGE', log, '+', '-', 'COUNT', '1')[1]
    local now = entry and entry[1] or ''
    if now == prev and now ~= '' then
      local t = ends[i]
      if not t then
        call('XADD', log, id, 't', blob)
      else
        call('XADD', log, id, 'k', 'e', 't', blob)
        call('PEXPIRE', log, ARGV[t + 1])
        redis.pcall('XDEL', ARGV[t + 2], ARGV[t + 3])
        call('SET', ARGV[t + 4], '1', 'PX', ARGV[4])
      end
      rung = rung + 1
      rings[2 * rung - 1] = ARGV[o + 4]
      rings[2 * rung] = blob
      now = id
    end
    out[i] = now
    o = o + 4
  end
  if rung > 0 then
    redis.pcall('XADD', KEYS[b], 'MAXLEN', '~', ARGV[2], '*', 'm', array(rung) .. table.concat(rings))
    call('PEXPIRE', KEYS[b], ARGV[3])
  end
end
return out
