-- A request of a limited key is over: free its place, and correct what was reserved by what was used.
-- KEYS bucket slots ; ARGV id tokens_limit reserved used
if call('ZREM', KEYS[2], ARGV[1]) == 0 then return 0 end   -- done already; also a write that a full memory allows
local limit = tonumber(ARGV[2])
if limit > 0 then
  local now = now_ms()
  pour(KEYS[1], 't', limit, level(KEYS[1], 't', limit, now) + math.min(ARGV[3], limit) - ARGV[4], now)
end
return 1
