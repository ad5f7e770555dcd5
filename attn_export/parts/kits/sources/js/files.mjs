/** Opening of bundles on disk, in Node.js: the one of this kit, or any other. */

import { readFile, stat } from 'node:fs/promises';
import { fileURLToPath } from 'node:url';
import { join, resolve } from 'node:path';
import { BundleError, openBundle } from './bundle.mjs';

const DIALECTS = ['ort', 'standard', 'portable'];
const WEIGHTS = 'weights.safetensors';
/** Largest size of a file. All stored test cases together take 32 MiB at most. */
const MOST_BYTES = 2 ** 28;
const KIT = fileURLToPath(new URL('..', import.meta.url));

/**
 * Open a bundle.
 * @param {string} [folder]  By default the one that this kit was made for.
 * @returns {Promise<{bundle: import('./bundle.mjs').Bundle, graph: string, decode: string | null,
 *   readAll: import('./bundle.mjs').Read}>}  `graph`, `decode`: the paths of the graph and of that for
 *   single tokens; `readAll`: gives a file of any size.
 * @throws {BundleError} If it is incomplete or damaged.
 */
export async function open(folder) {
  const chosen = folder ? {} : await settings();
  const root = folder ? resolve(folder) : join(KIT, 'bundle');
  const read = async (path, most = MOST_BYTES) => {
    const { size } = await regularFile(join(root, path));
    if (size > most) throw new Error(`it has ${size} bytes; ${most} are the most`);
    return readFile(join(root, path));
  };
  const bundle = await openBundle(read, DIALECTS, chosen);
  const { file, decode } = bundle.graph;
  for (const opened of [file, WEIGHTS, ...(decode ? [decode] : [])]) {
    await checkEngineFile(root, opened);
  }
  const paths = { graph: join(root, file), decode: decode && join(root, decode) };
  return { bundle, ...paths, readAll: (path) => read(path, Infinity) };
}

/** Check the files that ONNX Runtime opens: the graph and the files with its weights. */
async function checkEngineFile(root, file) {
  try {
    await regularFile(join(root, file));
  } catch (error) {
    if (error.code === 'ENOENT' && file === WEIGHTS) return;
    throw new BundleError(`${file} cannot be read: ${error.message}`);
  }
}

/** Check that a file is regular. Data of pipes and devices may have no end. */
async function regularFile(path) {
  const found = await stat(path);
  if (!found.isFile()) throw new Error('it is not a regular file');
  return found;
}

async function settings() {
  try {
    return JSON.parse(await readFile(join(KIT, 'kit.json'), 'utf8'));
  } catch (error) {
    throw new BundleError(`kit.json cannot be read: ${error.message}`);
  }
}
