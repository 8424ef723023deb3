local call, END = redis.call, '9007199254740991'

-- The last entry of a log: attempt, said, fields, id; nil when there is no log.
local function last(log)
  local entry = call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
  if not entry then return nil end
  local attempt, said = string.match(entry[1], '^(%d+)-(%d+)$')
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  return attempt, said, fields, entry[1]
end

-- A new attempt: the server's clock in ms, but always above `attempt`.
local function after(attempt)
  local now = call('TIME')
  return string.format('%.0f', math.max(now[1] * 1000 + math.floor(now[2] / 1000), tonumber(attempt) + 1))
end

-- Launches since the last token: a token in the log sets the count back to zero.
local function tries(fields)
  return fields and (fields.k == 'f' or fields.k == 'o') and tonumber(fields.n) or 0
end

-- What rings in an inbox, as msgpack: the head of an array of rings, and of one ring, which its delta follows.
local function array(n) return string.char(220, math.floor(n / 256), n % 256) end
local function bin(word) return string.char(196, #word) .. word end
local function ring(uid, prev, id) return string.char(148, 217, #uid) .. uid .. bin(prev) .. bin(id) end
