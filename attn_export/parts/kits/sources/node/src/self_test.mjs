#!/usr/bin/env node
/**
 * Self-test on the stored test cases: `npm test`, or `node src/self_test.mjs [BUNDLE]`.
 *
 * Exit code 0: all cases passed; 1: a case failed or is not compared; 2: the bundle cannot be read,
 * or ONNX Runtime refuses a graph.
 */

import { check } from './check.mjs';
import { BundleError } from './bundle.mjs';
import { ENGINE, loadGraphs } from './engine.mjs';
import { open } from './files.mjs';
import { oneLine, printable } from './text.mjs';

async function main(folder) {
  const started = performance.now();
  const opened = await open(folder);
  const { bundle } = opened;
  const model = await loadGraphs(opened).catch((error) => {
    throw new BundleError(`${ENGINE} refuses ${bundle.graph.file}: ${oneLine(error)}`);
  });
  let [count, failed] = [0, 0];
  for await (const result of check(model, bundle)) {
    console.log(line(result));
    count++;
    if (result.status !== 'passed') failed++;
  }
  const seconds = ((performance.now() - started) / 1000).toFixed(2);
  const summary = failed ? `${failed} of ${count} failed` : `all ${count} passed`;
  console.log(`${printable(bundle.name)}: ${summary}; ${printable(bundle.graph.file)} in ${ENGINE}, ${seconds} s`);
  return failed ? 1 : 0;
}

const WORDS = { passed: 'ok  ', failed: 'FAIL', unusable: 'not-compared' };

function line({ name, status, share, why }) {
  const what = status === 'passed' ? `${share.toFixed(3)} of tolerance` : why;
  return `${WORDS[status]} ${printable(name)}  ${printable(what)}`;
}

try {
  process.exitCode = await main(process.argv[2]);
} catch (error) {
  console.error(oneLine(error));
  process.exitCode = 2;
}
