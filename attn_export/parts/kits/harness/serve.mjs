/**
 * Serves a graph with onnxruntime-node: `node serve.mjs GRAPH THREADS`.
 *
 * Speaks as the docstring of attn_export/parts/kits/program.py says, over the kit's model code.
 */

import { createRequire } from 'node:module';
import { Reader, answer, failure, loaded, readRequest } from './src/frames.mjs';
import { load } from './src/engine.mjs';

async function main(graph, threads) {
  const say = speaker();
  let model;
  try {
    model = await load(graph, { threads: Number(threads) });
  } catch (error) {
    say(failure(error));
    return;
  }
  const { version } = createRequire(import.meta.url)('onnxruntime-node/package.json');
  say(loaded({ version, device: 'cpu', node: process.versions.node }));
  const reader = new Reader(process.stdin);
  for (let request; (request = await readRequest(reader)); ) {
    say(await model.run(request.inputs, request.bound).then(answer, failure));
  }
}

/** Writes to stdout; what others print goes to stderr. */
function speaker() {
  const write = process.stdout.write.bind(process.stdout);
  console.log = console.info = console.error;
  process.stdout.on('error', () => process.exit(0)); // the reader has ended
  return write;
}

await main(...process.argv.slice(-2));
process.exit(0);
