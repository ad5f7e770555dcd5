/**
 * Reader of bundles of attn-export, from any source: a disk, a server, or dropped files.
 *
 * @typedef {import('./dtypes.mjs').Tensors} Tensors
 * @typedef {(path: string) => Promise<Uint8Array>} Read  Gives a file of the bundle.
 * @typedef {{dtype: string, shape: (string | number)[]}} Value  Dynamic axes have names.
 *
 * @typedef {object} Graph
 * @property {string} file
 * @property {string} dialect
 * @property {Record<string, string>} bound  Outputs that may share the buffer of an input.
 * @property {Record<string, number[]>} layouts  For inputs and outputs whose axes are in another
 *   order, that order: axis i of the graph is axis `order[i]` of the signature.
 * @property {string | null} decode  The graph for steps of one token, where there is one.
 *
 * @typedef {object} Case
 * @property {string} name
 * @property {string} kind
 * @property {string} folder
 * @property {string} about
 * @property {Record<string, number>} sizes  Of the dynamic axes.
 * @property {Record<string, {whole: number, row: number} | null>} allowed
 * @property {Record<string, string>} unusable  The reason, for each output that is not compared.
 * @property {number[]} ignored_rows  Batch elements that are not compared.
 *
 * @typedef {object} Bundle
 * @property {string} name
 * @property {Graph} graph  The one to use, for any number of tokens.
 * @property {Record<string, Value>} inputs
 * @property {Record<string, Value>} outputs
 * @property {Case[]} cases
 * @property {"none" | "append" | "in-place"} cache
 * @property {string[]} pasts  The inputs that hold the cache.
 * @property {Record<string, string>} presents  The output that each of them is in the next step.
 * @property {string | null} replay  The case that is replayed token by token.
 * @property {{vocabulary: number, most: number, ends: number[], text: boolean} | null} ids  Of a whole
 *   model, by the kit's settings: the number of ids, of tokens that a cache may hold, the ids that
 *   end a text, and whether there is a tokenizer.
 * @property {Read} read
 */

import { checkLengths, checkValues, sizesOf } from './signature.mjs';
import { readTensor } from './tensorproto.mjs';

const FORMAT = 'attn-export-bundle/4';
const CACHES = { present_key: 'past_key', present_value: 'past_value' };
const FOLDER = /^test_data_set_[0-9]+$/;

/** Error for a bundle that is incomplete or damaged. */
export class BundleError extends Error {}

/**
 * Read the manifest of a bundle and the index of its stored test cases.
 * @param {Read} read
 * @param {string[]} dialects  Dialects to choose a graph from, the best first, if none is chosen.
 * @param {{graph?: string, replay?: string | null, ids?: Bundle["ids"]}} [chosen]  The choices of the kit.
 * @returns {Promise<Bundle>}
 * @throws {BundleError} If a file is missing or is not what it should be.
 */
export async function openBundle(read, dialects, chosen = {}) {
  const manifest = await readJson(read, 'manifest.json');
  if (manifest?.format !== FORMAT) {
    throw new BundleError(`manifest.json is not of the format ${FORMAT}; build the bundle again`);
  }
  const index = await readJson(read, 'golden/index.json');
  try {
    const graph = graphOf(manifest.graphs, dialects, chosen.graph, manifest.roles);
    const { name } = manifest;
    const [inputs, outputs] = [manifest.inputs, manifest.outputs].map((ends) => byRole(ends, manifest.roles));
    checkValues(inputs);
    checkValues(outputs);
    checkLayouts(graph.layouts, { ...inputs, ...outputs });
    const caches = Object.entries(manifest.caches ?? CACHES).filter(
      ([present, past]) => Object.hasOwn(outputs, present) && Object.hasOwn(inputs, past),
    );
    const presents = Object.fromEntries(caches.map(([present, past]) => [past, present]));
    const pasts = Object.keys(inputs).filter((past) => Object.hasOwn(presents, past));
    const cache = pasts.length === 0 ? 'none' : 'past_length' in inputs ? 'in-place' : 'append';
    // Of a large model, some cases are stored in part: those with shapes.
    const whole = Array.isArray(index.cases) ? index.cases.filter((entry) => !entry?.shapes) : [];
    // A graph that rounds inputs of products has tolerances of its own, which have no limit.
    const cases = graph.exact ? whole.map((entry) => ({ ...entry, allowed: entry?.rounded, limited: false })) : whole;
    if (cases.length === 0) throw new Error('there are no cases');
    for (const entry of cases) checkEntry(entry, Object.keys(outputs));
    // A case of this kind can be decoded. For others, only the kit's settings say so.
    const decode = cases.find(({ kind }) => kind === 'decode')?.name ?? null;
    const replay = chosen.replay === undefined ? decode : chosen.replay;
    const ids = chosen.ids ?? null;
    return { name, graph, inputs, outputs, cases, cache, pasts, presents, replay, ids, read };
  } catch (error) {
    throw new BundleError(`the bundle is damaged: ${error.message}`);
  }
}

/**
 * The inputs of a case and its reference.
 * @param {Bundle} bundle
 * @param {Case} entry
 * @returns {Promise<{inputs: Tensors, expected: Tensors, sizes: Record<string, number>}>}  `sizes`:
 *   those of the named axes.
 * @throws {BundleError} If a file is missing or holds no tensor of that name, type and shape.
 */
export async function readCase(bundle, entry) {
  const all = [];
  const tensors = async (stem, values) => {
    const found = {};
    for (const [number, [name, value]] of Object.entries(values).entries()) {
      const path = `golden/${entry.folder}/${stem}_${number}.pb`;
      found[name] = named(path, name, await readFile(bundle.read, path));
      all.push({ path, value, tensor: found[name] });
    }
    return found;
  };
  const inputs = await tensors('input', bundle.inputs);
  const expected = await tensors('output', bundle.outputs);
  const sizes = sizesOfCase(entry, all, inputs);
  for (const [name, { dims }] of Object.entries(expected)) {
    if (dims.length && entry.ignored_rows.some((row) => row >= dims[0])) {
      throw new BundleError(`${entry.name} ignores rows that ${name} does not have`);
    }
  }
  return { inputs, expected, sizes };
}

function sizesOfCase(entry, all, inputs) {
  try {
    const sizes = sizesOf(all);
    checkLengths(inputs, sizes);
    return sizes;
  } catch (error) {
    throw new BundleError(`${entry.name} is damaged: ${error.message}`);
  }
}

/** Inputs or outputs whose axes have the names of their roles; axes without one get one. */
function byRole(ends, roles = {}) {
  const named = Object.entries(ends).map(([name, { dtype, shape }]) => {
    const axes = shape.map((axis, at) => (axis === '' ? `${name}.${at}` : roles[axis] ?? axis));
    return [name, { dtype, shape: axes }];
  });
  return Object.fromEntries(named);
}

/** Check the types of the values by which the judge decides. */
function checkEntry({ name, folder, allowed = {}, unusable, ignored_rows: rows }, outputs) {
  if (!FOLDER.test(folder)) throw new Error(`golden/index.json puts ${name} into ${folder}`);
  const isError = (value) => typeof value === 'number' && value > 0;
  const isAllowed = (value) => value === null || (isError(value?.whole) && isError(value.row));
  const right =
    outputs.every((output) => Object.hasOwn(allowed, output) && isAllowed(allowed[output])) &&
    Object.values(unusable).every((why) => typeof why === 'string') &&
    Array.isArray(rows) && rows.every((row) => Number.isSafeInteger(row) && row >= 0);
  if (!right) throw new Error(`golden/index.json does not say how ${name} is judged`);
}

function graphOf(listed, dialects, chosen, roles) {
  const usable = Object.entries(listed)
    .filter(([, { fixed }]) => !some(fixed))
    .map(([file, { dialect, bound = {}, layouts = {}, exact = '' }]) => ({ file, dialect, bound, layouts, exact }));
  const found = chosen
    ? usable.find(({ file }) => file === chosen)
    : dialects.flatMap((wanted) => usable.filter(({ dialect }) => dialect === wanted))[0];
  if (!found) throw new Error(`there is no graph ${chosen ?? `in the ${dialects.join(' or ')} dialect`}`);
  const decode = decodeGraphOf(listed, found, roles);
  for (const file of [found.file, decode ?? '']) {
    if (/^[/\\]|(^|[/\\])\.\.([/\\]|$)/.test(file)) throw new Error(`${file} is outside it`);
  }
  return { ...found, decode };
}

/** The graph for single tokens with the same dialect and cache layout as another graph. */
function decodeGraphOf(listed, { dialect, layouts }, roles = {}) {
  const isSingle = ([[axis, size] = [], ...more]) =>
    (roles[axis] ?? axis) === 'query_len' && size === 1 && more.length === 0;
  const found = Object.entries(listed).find(
    ([, graph]) =>
      graph.dialect === dialect &&
      JSON.stringify(graph.layouts ?? {}) === JSON.stringify(layouts) &&
      isSingle(Object.entries(graph.fixed ?? {})),
  );
  return found ? found[0] : null;
}

/** Check that an order of axes is a permutation. */
function checkLayouts(layouts, values) {
  for (const [name, order] of Object.entries(layouts)) {
    const axes = values[name]?.shape.map((_, axis) => axis);
    if (!axes || !Array.isArray(order) || `${[...order].sort()}` !== `${axes}`) {
      throw new Error(`the graph has no order of the axes of ${name}`);
    }
  }
}

const some = (object) => Object.keys(object ?? {}).length > 0;

function named(path, name, bytes) {
  try {
    const { name: found, tensor } = readTensor(bytes);
    if (found === name) return tensor;
    throw new Error(`it holds "${found}", expected "${name}"`);
  } catch (error) {
    throw new BundleError(`${path} is damaged: ${error.message}`);
  }
}

/**
 * Read a file of JSON.
 * @param {Read} read
 * @param {string} path
 * @returns {Promise<unknown>}
 * @throws {BundleError} If it is missing or is none.
 */
export async function readJson(read, path) {
  const bytes = await readFile(read, path);
  try {
    return JSON.parse(new TextDecoder().decode(bytes));
  } catch (error) {
    throw new BundleError(`${path} is damaged: ${error.message}`);
  }
}

async function readFile(read, path) {
  try {
    return await read(path);
  } catch (error) {
    throw new BundleError(`${path} cannot be read: ${error.message}`);
  }
}
