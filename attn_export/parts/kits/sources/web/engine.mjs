/** ONNX Runtime in the browser: WebAssembly or WebGPU; WebAssembly in Node.js, too. */

import { externalFiles } from './lib/external_data.mjs';
import { Model } from './lib/model.mjs';

const DIST = new URL('./node_modules/onnxruntime-web/dist/', import.meta.url).href;
const IN_PAGE = typeof window !== 'undefined';
const MODULES = { wasm: IN_PAGE ? 'ort.wasm.min.mjs' : 'ort.node.min.mjs', webgpu: 'ort.webgpu.min.mjs' };
const ERRORS_ONLY = 3;

/** @typedef {"wasm" | "webgpu"} Kind */

/** The reason that this browser lacks an engine, or "". */
export async function unavailable(/** @type {Kind} */ kind) {
  if (kind !== 'webgpu') return '';
  if (!navigator.gpu) return 'this browser has no WebGPU, or the page is not served securely';
  return (await navigator.gpu.requestAdapter()) ? '' : 'WebGPU finds no adapter here';
}

/**
 * Load a graph.
 * @param {Kind} kind
 * @param {(path: string) => Promise<Uint8Array>} read  Reads the graph and files beside it.
 * @param {string} file  The graph.
 * @param {{threads?: number}} [options]  By default as many as are useful. Threads need a page
 *   that is isolated from other origins; elsewhere there is one.
 * @returns {Promise<{model: Model, facts: Record<string, unknown>}>}
 * @throws {Error} If ONNX Runtime refuses the graph.
 */
export async function load(kind, read, file, { threads = cores() } = {}) {
  const ort = await import(DIST + MODULES[kind]);
  const used = IN_PAGE && !crossOriginIsolated ? 1 : threads;
  ort.env.wasm.wasmPaths = DIST;
  ort.env.wasm.numThreads = used;
  ort.env.logLevel = 'error';
  const get = (path) =>
    read(path).catch((error) => {
      throw new Error(`${path} cannot be read: ${error.message}`);
    });
  const graph = await get(file);
  const externalData = await Promise.all(
    externalFiles(graph).map(async (path) => ({ path, data: await get(path) })),
  );
  const session = await ort.InferenceSession.create(graph, {
    executionProviders: [kind],
    externalData,
    logSeverityLevel: ERRORS_ONLY,
  });
  const device = kind === 'webgpu' ? await adapterName() : 'cpu';
  const facts = { version: ort.env.versions.web, device, threads: used };
  return { model: new Model(ort, session, false), facts };
}

const cores = () => Math.min(globalThis.navigator?.hardwareConcurrency ?? 1, 4);

/** The name of the GPU, such as "nvidia ampere" or "google swiftshader, in software". */
async function adapterName() {
  const adapter = await navigator.gpu.requestAdapter();
  const { vendor, architecture, description } = adapter.info;
  const named = [vendor, architecture].filter(Boolean).join(' ') || description || 'unnamed';
  const software = adapter.info.isFallbackAdapter || /swiftshader|llvmpipe/i.test(named);
  return software ? `${named}, in software` : named;
}
