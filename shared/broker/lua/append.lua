-- Write what one flush says, each item only if its log still ends where the writer thinks it does, and ring the
-- inboxes in the same breath. Answers per item the last id of its log: the item's own id when it is written.
-- KEYS inbox.. log.. ; ARGV inboxes cap inbox_ttl abort_ttl, then per item:
--   prev id blob uid inbox# and, for a terminal, ttl generate entry abort (else four empty words)
local inboxes, out, rings, o = tonumber(ARGV[1]), {}, {}, 4
-- First a write that a full memory allows, which lets the rest pass: what is said here frees more than it takes.
call('PEXPIRE', KEYS[1], ARGV[3])
for i = 1, (#ARGV - 4) / 9 do
  local log, prev, id, blob = KEYS[inboxes + i], ARGV[o + 1], ARGV[o + 2], ARGV[o + 3]
  local entry = call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
  local now = entry and entry[1] or ''
  if now == prev and now ~= '' then
    if ARGV[o + 6] ~= '' then
      call('XADD', log, id, 'k', 'e', 't', blob)
      call('PEXPIRE', log, ARGV[o + 6])
      call('XDEL', ARGV[o + 7], ARGV[o + 8])
      call('SET', ARGV[o + 9], '1', 'PX', ARGV[4])
    else
      call('XADD', log, id, 'k', 't', 't', blob)
    end
    local b = tonumber(ARGV[o + 5])
    local ring = rings[b] or {}
    rings[b] = ring
    ring[#ring + 1] = ARGV[o + 4]
    ring[#ring + 1] = prev .. ' ' .. id .. ' ' .. blob
    now = id
  end
  out[i] = now
  o = o + 9
end
for b, ring in pairs(rings) do
  call('XADD', KEYS[b], 'MAXLEN', '~', ARGV[2], '*', unpack(ring))
  call('PEXPIRE', KEYS[b], ARGV[3])
end
return out
