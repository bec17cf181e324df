@0xd8f4a1c06b2e9f35;

interface Echo {
  echo @0 (bytes :Data) -> (bytes :Data);
}
