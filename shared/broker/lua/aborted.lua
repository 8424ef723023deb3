-- Which doorbells ring: places (from 0) of the keys that exist.
if call('EXISTS', unpack(KEYS)) == 0 then return {} end
local out = {}
for i, value in ipairs(call('MGET', unpack(KEYS))) do
  if value then out[#out + 1] = i - 1 end
end
return out
