/** The bundle beside this folder, or any other on disk. */

import { readFile } from 'node:fs/promises';
import { fileURLToPath } from 'node:url';
import { join, resolve } from 'node:path';
import { BundleError, openBundle } from './bundle.mjs';

const DIALECTS = ['ort', 'standard', 'portable'];
const KIT = fileURLToPath(new URL('..', import.meta.url));

/**
 * Open a bundle.
 * @param {string} [folder]  By default the one that this kit was made for.
 * @returns {Promise<{bundle: import('./bundle.mjs').Bundle, graph: string}>}  `graph`: its path.
 * @throws {BundleError} If it is incomplete or damaged.
 */
export async function open(folder) {
  const chosen = folder ? {} : await settings();
  const root = folder ? resolve(folder) : join(KIT, 'bundle');
  const bundle = await openBundle((path) => readFile(join(root, path)), DIALECTS, chosen);
  return { bundle, graph: join(root, bundle.graph.file) };
}

async function settings() {
  try {
    return JSON.parse(await readFile(join(KIT, 'kit.json'), 'utf8'));
  } catch (error) {
    throw new BundleError(`kit.json cannot be read: ${error.message}`);
  }
}
