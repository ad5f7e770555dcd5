/** ONNX Runtime in Node.js. */

import { readFile } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { Model, TwoGraphs } from './model.mjs';

// It would report its use to its maker, and write files. It looks when it is loaded.
process.env.ORT_DISABLE_TELEMETRY ??= '1';
const { default: ort } = await import('onnxruntime-node');

const ERRORS_ONLY = 3;

/** What runs the graph, with its version. */
export const ENGINE = `onnxruntime-node ${versionOf('onnxruntime-node')}`;

/**
 * Load a graph; weights in files beside it are found.
 * @param {string} path  The `.onnx` file.
 * @param {{threads?: number}} [options]  Threads for computing; by default as many as there are
 *   cores.
 * @returns {Promise<Model>}
 * @throws {Error} If ONNX Runtime refuses it.
 */
export async function load(path, { threads = 0 } = {}) {
  // By default x86 processors with AVX2 and without VNNI cut sums of two products of 8 bits off, and
  // ARM processors take a scale for each row where a graph has one for the tensor or for a block. The
  // options against it make others slower.
  const processor = await readFile('/proc/cpuinfo', 'utf8').catch(() => '');
  const mayBeInexact = !processor.includes('avx512_vnni');
  const bytes = mayBeInexact ? await readFile(path) : Buffer.alloc(0);
  const wanted = bytes.includes('MatMulInteger');
  // The attribute of MatMulNBits, of protobuf's int 4.
  const byBlock = bytes.includes('accuracy_level\x18\x04');
  const exact = wanted ? { x64quantprecision: '1' } : {};
  const mlas = wanted || byBlock ? { disable_kleidiai: '1' } : {};
  const session = await ort.InferenceSession.create(path, {
    executionProviders: ['cpu'],
    intraOpNumThreads: threads,
    interOpNumThreads: 1,
    logSeverityLevel: ERRORS_ONLY,
    // By default a product with dequantised weights rounds its inputs to 8 bits.
    extra: { session: { qdq_matmulnbits_accuracy_level: '1', ...exact }, mlas },
  });
  return new Model(ort, session, true);
}

/**
 * Load a bundle's graphs: one for any number of tokens and, where there is one, that for single
 * tokens.
 * @param {{bundle: import('./bundle.mjs').Bundle, graph: string, decode: string | null}} opened
 * @param {{threads?: number}} [options]  As of `load`.
 * @returns {Promise<Model | TwoGraphs>}
 * @throws {Error} If ONNX Runtime refuses one.
 */
export async function loadGraphs({ bundle, graph, decode }, options) {
  const any = await load(graph, options);
  return decode === null ? any : new TwoGraphs(any, await load(decode, options), bundle.inputs);
}

function versionOf(name) {
  return createRequire(import.meta.url)(`${name}/package.json`).version;
}
