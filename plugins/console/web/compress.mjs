// Writes FILE.gz beside each built file. No time and no name is in them, so that two builds are equal byte for byte.
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { gzipSync } from "node:zlib";

const assets = new URL("../static/assets/", import.meta.url).pathname;
for (const name of readdirSync(assets)) {
  const packed = gzipSync(readFileSync(join(assets, name)), { level: 9 });
  packed[9] = 255; // the byte that names the system that packed it
  writeFileSync(join(assets, `${name}.gz`), packed);
}
