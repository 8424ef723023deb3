-- A request of a limited key is over: free its place, and correct what was reserved by what was used.
-- KEYS bucket slots ; ARGV id tokens_limit reserved used
local limit, now = tonumber(ARGV[2]), now_ms()
local left = limit > 0 and level(KEYS[1], 't', limit, now)
if call('ZREM', KEYS[2], ARGV[1]) == 0 then return 0 end   -- done already; also a write that a full memory allows
if left then pour(KEYS[1], 't', limit, left + math.min(ARGV[3], limit) - ARGV[4], now) end
return 1
