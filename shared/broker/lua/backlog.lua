-- Length of a stream, and the age of its oldest entry in ms by the server's own clock.
-- KEYS stream
local oldest = call('XRANGE', KEYS[1], '-', '+', 'COUNT', 1)[1]
if not oldest then return {0, 0} end
local now = call('TIME')
local ms = now[1] * 1000 + math.floor(now[2] / 1000)
return {call('XLEN', KEYS[1]), math.max(0, ms - tonumber(string.match(oldest[1], '^%d+')))}
