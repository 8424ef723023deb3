-- Put aside what a stranger has left under names of ours: whatever is of another kind than it has to be.
-- KEYS ours.. aside.. ; ARGV ttl kind..
local found, n = {}, #KEYS / 2
for i = 1, n do
  local kind = call('TYPE', KEYS[i]).ok
  if kind ~= 'none' and kind ~= ARGV[1 + i] then
    call('RENAME', KEYS[i], KEYS[n + i])
    call('PEXPIRE', KEYS[n + i], ARGV[1])
    found[#found + 1] = KEYS[i]
  end
end
return found
