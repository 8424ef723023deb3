-- Open the logs of all choices of one request and queue it, or open one log again after data was lost.
-- KEYS log.. tokenize [bucket slots] ; ARGV choices cap ttl payload, then per choice: uid expect seen said header
--   replica life told, then for a limited key what limits.lua says
local n, args, out = tonumber(ARGV[1]), {}, {}
for i = 1, n do
  local o = 4 + (i - 1) * 8
  local _, _, _, id = last(KEYS[i])
  if (id or '') ~= ARGV[o + 2] then return {'CHANGED', i - 1, id or ''} end
  args[2 * i - 1], args[2 * i] = 'u', ARGV[o + 1]
end
if ARGV[2] ~= '' and call('XLEN', KEYS[n + 1]) >= tonumber(ARGV[2]) then return {'FULL'} end
local bucket, slots, levels, now, r, t = KEYS[n + 2], KEYS[n + 3], ''
if bucket then
  now = now_ms()
  local why
  why, levels, r, t = judge(bucket, slots, 5 + n * 8, now)
  if why ~= '' then return {'LIMITED', why, levels} end
end
-- The first write is one that a full memory refuses, so that `open` happens whole or not at all.
local entry = call('XADD', KEYS[n + 1], '*', 'm', ARGV[4], unpack(args))
if bucket then admit(bucket, slots, 5 + n * 8, now, r, t) end
for i = 1, n do
  local o = 4 + (i - 1) * 8
  local attempt, _, fields = last(KEYS[i])
  if not attempt or attempt == END then attempt = '0' end
  local id = after(math.max(tonumber(attempt), tonumber(ARGV[o + 3]))) .. '-' .. ARGV[o + 4]
  call('DEL', KEYS[i])
  call('XADD', KEYS[i], id, 'k', 'o', 'q', entry, 'n', tries(fields), 'r', ARGV[o + 6], 'l', ARGV[o + 7], 'h', ARGV[o + 5],
    't', ARGV[o + 8])
  call('PEXPIRE', KEYS[i], ARGV[3])
  out[i] = id
end
return {'OK', entry, levels, unpack(out)}
