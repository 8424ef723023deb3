-- Write what one flush says, each item only if its log ends where the writer thinks it does, and ring the inboxes in
-- the same breath. Answers whether the flush before is there, then place (from 1) and last id of the log of each item
-- that was not written, one after the other: nearly always none.
-- KEYS inbox.. log.. (by inbox) [flush] ; ARGV before number flush_ttl cap inbox_ttl abort_ttl prefix_len inboxes
--   words_of_terminals, items and rings per inbox.., item# ttl generate entry abort per terminal.., prev id blob per
--   item.. ; prev is '' where the writer has seen, in its flushes up to `before`, the id just before the item's.
local before, number, inboxes = ARGV[1], ARGV[2], tonumber(ARGV[8])
local holds = before == '' or call('GET', KEYS[#KEYS]) == before
local out, ends, i, o = {holds and 1 or 0}, {}, 0, 9 + 2 * inboxes + ARGV[9]
for t = 10 + 2 * inboxes, o, 5 do ends[tonumber(ARGV[t])] = t end

local function last_id(log)
  local entry = call('XREVRANGE', log, '+', '-', 'COUNT', '1')[1]
  return entry and entry[1] or ''
end

local function just_before(id)
  local attempt, said = string.match(id, '^(%d+)-(%d+)$')
  return string.format('%s-%.0f', attempt, said - 1)
end

-- Whoever has the flush before has all that was there then, and a log only grows or goes: it has the id just before
-- this one. The server takes this one if nothing else is behind that, and makes no log.
local function follow(log, id, blob)
  if redis.pcall('XADD', log, 'NOMKSTREAM', id, 't', blob) == id then return true end
  return false, last_id(log)
end

local function compare_and_add(log, prev, id, blob, t)
  local now = last_id(log)
  if now == '' or now ~= prev then return false, now end
  if not t then
    call('XADD', log, id, 't', blob)
  else
    call('XADD', log, id, 'k', 'e', 't', blob)
    call('PEXPIRE', log, ARGV[t + 1])
    redis.pcall('XDEL', ARGV[t + 2], ARGV[t + 3])
    call('SET', ARGV[t + 4], '1', 'PX', ARGV[6])
  end
  return true
end

-- What rings of items that were not all written: places in KEYS and ARGV in front of the first, and which are left out.
local function ring_some(k, o, num, refused)
  local rings = {}
  for n = 1, num do
    if not refused[n] then
      local prev, id = ARGV[o + 1], ARGV[o + 2]
      if prev == '' then prev = just_before(id) end
      rings[#rings + 1] = ring(string.sub(KEYS[k + n], ARGV[7] + 1), prev, id) .. ARGV[o + 3]
    end
    o = o + 3
  end
  return array(#rings) .. table.concat(rings)
end

-- First a write that a full memory allows, which lets the rest pass: what is said here frees more than it takes.
call('PEXPIRE', KEYS[1], ARGV[5])
for b = 1, inboxes do
  local num, rings, refused, num_refused = tonumber(ARGV[8 + 2 * b]), ARGV[9 + 2 * b], {}, 0
  for n = 1, num do
    i = i + 1
    local log, prev, id, blob, written, now = KEYS[inboxes + i], ARGV[o + 1], ARGV[o + 2], ARGV[o + 3]
    if prev ~= '' then
      written, now = compare_and_add(log, prev, id, blob, ends[i])
    elseif holds then
      written, now = follow(log, id, blob)
    else
      written, now = compare_and_add(log, just_before(id), id, blob)
    end
    if not written then
      out[#out + 1] = i
      out[#out + 1] = now
      refused[n] = true
      num_refused = num_refused + 1
    end
    o = o + 3
  end
  if num_refused < num then
    if num_refused > 0 then rings = ring_some(inboxes + i - num, o - 3 * num, num, refused) end
    redis.pcall('XADD', KEYS[b], 'MAXLEN', '~', ARGV[4], '*', 'm', rings)
    call('PEXPIRE', KEYS[b], ARGV[5])
  end
end
if holds and number ~= '' then call('SET', KEYS[#KEYS], number, 'PX', ARGV[3]) end
return out
