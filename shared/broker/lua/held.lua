-- The entries of an engine's stream without their payloads: id, uid, id, uid, ...
-- KEYS generate
local out = {}
for i, entry in ipairs(call('XRANGE', KEYS[1], '-', '+')) do
  out[2 * i - 1], out[2 * i] = entry[1], ''
  for j = 1, #entry[2], 2 do if entry[2][j] == 'u' then out[2 * i] = entry[2][j + 1] end end
end
return out
