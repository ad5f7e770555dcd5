#!/usr/bin/env node
/** Continues a prompt with a whole model: `node src/generate.mjs ID,ID,… [TOKENS]`. */

import { BundleError, generate, loadGraphs, open } from './attention.mjs';
import { oneLine } from './text.mjs';

const [prompt, count = '64'] = process.argv.slice(2);
try {
  if (prompt === undefined) throw new BundleError('usage: node src/generate.mjs ID,ID,... [TOKENS]');
  const opened = await open();
  const ids = prompt === '' ? [] : prompt.split(',').map((id) => (/^[0-9]+$/.test(id) ? Number(id) : -1));
  let between = '';
  for await (const token of generate(await loadGraphs(opened), opened.bundle, ids, Number(count))) {
    process.stdout.write(`${between}${token}`);
    between = ' ';
  }
  process.stdout.write('\n');
} catch (error) {
  console.error(oneLine(error));
  process.exitCode = 2;
}
