#!/usr/bin/env node
/**
 * Continues a prompt with a whole model, in WebAssembly without a browser or native code:
 * `node generate.mjs ID,ID,… [TOKENS]`, or `--text TEXT`.
 */

import { availableParallelism } from 'node:os';
import { load } from './engine.mjs';
import { generateCommand } from './lib/generate_command.mjs';

const MOST_THREADS = 4;

await generateCommand(async ({ bundle, readAll }) => {
  const threads = Math.min(availableParallelism(), MOST_THREADS);
  return (await load('wasm', readAll, bundle.graph.file, { threads })).model;
});
