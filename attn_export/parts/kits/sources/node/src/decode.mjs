#!/usr/bin/env node
/** Decodes with the key/value cache: `npm run decode`, or `node src/decode.mjs [TOKENS]`. */

import { BundleError, ENGINE, loadGraphs, open } from './attention.mjs';
import { PROMPT, decodeTokens } from './decode_example.mjs';
import { oneLine, printable } from './text.mjs';

async function main(tokens) {
  const opened = await open();
  const { bundle } = opened;
  if (bundle.cache === 'none') {
    console.log(`${printable(bundle.name)} has no cache: there is nothing to decode with`);
    return;
  }
  const { held, each } = await decodeTokens(await loadGraphs(opened), bundle, tokens);
  console.log(
    `${printable(bundle.name)}: a prompt of ${PROMPT}, then ${tokens} tokens of ${each.toFixed(3)} ms each; ` +
      `${held} in the cache; ${printable(bundle.graph.decode ?? bundle.graph.file)} in ${ENGINE}`,
  );
}

const tokens = Number(process.argv[2] ?? 64);
try {
  if (!Number.isInteger(tokens) || tokens < 1) {
    throw new BundleError('usage: node src/decode.mjs [TOKENS]');
  }
  await main(tokens);
} catch (error) {
  console.error(oneLine(error));
  process.exitCode = 2;
}
