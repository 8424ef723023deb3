-- What the limits of one API key leave, by the server's clock. A bucket holds a minute's worth and fills evenly.
local function now_ms() local t = call('TIME'); return t[1] * 1000 + math.floor(t[2] / 1000) end
local function level(bucket, name, limit, now)
  local saved = call('HMGET', bucket, name, name .. '@')
  if not saved[1] then return limit end
  return math.min(limit, saved[1] + math.max(0, now - saved[2]) * limit / 60000)
end
local function pour(bucket, name, limit, value, now)
  call('HSET', bucket, name, string.format('%.3f', math.min(limit, value)), name .. '@', now)
  local life = 60000 + math.floor(math.max(0, limit - value) / limit * 60000)   -- forgotten when it is full again
  call('PEXPIRE', bucket, math.max(life, call('PTTL', bucket)))
end
-- May a request start? Writes nothing. ARGV from o: id life concurrency requests tokens need
-- Answers what stands in its way ('' nothing), and "<requests under way> <requests left> <tokens left> <ms until a
-- place is free at the latest, if nobody holds it any more>".
local function judge(bucket, slots, o, now)
  local most, requests, tokens = tonumber(ARGV[o + 2]), tonumber(ARGV[o + 3]), tonumber(ARGV[o + 4])
  local need = math.min(tonumber(ARGV[o + 5]), tokens)
  local running = call('ZCOUNT', slots, now, '+inf')
  local r, t = level(bucket, 'r', requests, now), level(bucket, 't', tokens, now)
  local why = most > 0 and running >= most and 'concurrency' or requests > 0 and r < 1 and 'requests'
    or tokens > 0 and need > 0 and t < need and 'tokens' or ''
  local free = 0
  if why == 'concurrency' then
    free = call('ZRANGEBYSCORE', slots, now, '+inf', 'WITHSCORES', 'LIMIT', running - most, 1)[2] - now
  end
  if why == '' then running, r, t = running + 1, r - 1, t - need end
  return why, string.format('%d %.3f %.3f %d', running, r, t, free), r, t
end
-- Count a request in, as `judge` found it.
local function admit(bucket, slots, o, now, r, t)
  local requests, tokens = tonumber(ARGV[o + 3]), tonumber(ARGV[o + 4])
  if requests > 0 then pour(bucket, 'r', requests, r, now) end
  if tokens > 0 then pour(bucket, 't', tokens, t, now) end
  call('ZREMRANGEBYSCORE', slots, '-inf', now)
  call('ZADD', slots, now + ARGV[o + 1], ARGV[o])
  call('PEXPIRE', slots, ARGV[o + 1])
end
