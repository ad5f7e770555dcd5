/** ONNX Runtime in Node.js. */

import { readFile } from 'node:fs/promises';
import { createRequire } from 'node:module';
import { Model, TwoGraphs } from './model.mjs';

// Otherwise ONNX Runtime reports its use to its maker and writes files. It must be set first.
process.env.ORT_DISABLE_TELEMETRY ??= '1';
const { default: ort } = await import('onnxruntime-node');

const ERRORS_ONLY = 3;

/** The name and the version of the engine. */
export const ENGINE = `onnxruntime-node ${versionOf('onnxruntime-node')}`;

/**
 * Load a graph. Weights in files beside it are loaded too.
 * @param {string} path  The `.onnx` file.
 * @param {{threads?: number}} [options]  Threads for computing; by default as many as there are
 *   cores.
 * @returns {Promise<Model>}
 * @throws {Error} If ONNX Runtime refuses it.
 */
export async function load(path, { threads = 0 } = {}) {
  // By default x86 processors with AVX2 but without VNNI saturate sums of two products of 8 bits,
  // and ARM processors use one scale per row where a graph has one per tensor or per block. The
  // options that prevent this make other processors slower.
  const processor = await readFile('/proc/cpuinfo', 'utf8').catch(() => '');
  const mayBeInexact = !processor.includes('avx512_vnni');
  const bytes = mayBeInexact ? await readFile(path) : Buffer.alloc(0);
  const wanted = bytes.includes('MatMulInteger');
  // The attribute accuracy_level = 4 of MatMulNBits, as it is encoded in the file.
  const byBlock = bytes.includes('accuracy_level\x18\x04');
  const exact = wanted ? { x64quantprecision: '1' } : {};
  const mlas = wanted || byBlock ? { disable_kleidiai: '1' } : {};
  const session = await ort.InferenceSession.create(path, {
    executionProviders: ['cpu'],
    intraOpNumThreads: threads,
    interOpNumThreads: 1,
    logSeverityLevel: ERRORS_ONLY,
    // Otherwise a product with dequantised weights rounds its inputs to 8 bits.
    extra: { session: { qdq_matmulnbits_accuracy_level: '1', ...exact }, mlas },
  });
  return new Model(ort, session, true);
}

/**
 * Load a bundle's graphs: one for any number of tokens and, if there is one, that for single
 * tokens.
 * @param {{bundle: import('./bundle.mjs').Bundle, graph: string, decode: string | null}} opened
 * @param {{threads?: number}} [options]  The options of `load`.
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
