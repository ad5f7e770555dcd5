/**
 * The rule by which an output passes.
 *
 * All values are widened to float64. t is the reference and r the output of the engine. `whole` is
 * ‖r − t‖ / ‖t‖, `row` the largest ‖r_row − t_row‖ / ‖t_row‖ over rows of the last axis with
 * t_row ≠ 0. Both must be within the bundle's tolerances. Rows with t_row = 0 must be 0.
 */

import { epsOf, isFloating, sizeOf, widen } from './dtypes.mjs';

/** Limits of each tolerance, in units of eps and as a fraction; beyond, it is not compared. */
const LIMITS = [['whole', 2 ** 17, 1 / 8], ['row', 2 ** 20, 1 / 2]];
const OVER = { whole: 'the whole output', row: 'one row' };

/**
 * @typedef {import('./dtypes.mjs').Tensor} Tensor
 * @typedef {import('./dtypes.mjs').Tensors} Tensors
 * @typedef {{whole: number, row: number}} Measures
 *
 * @typedef {object} Rules
 * @property {Record<string, Measures | null>} allowed
 * @property {Record<string, string>} unusable  The reason, for each output that is not compared.
 * @property {number[]} ignored_rows  Batch elements that are not compared.
 * @property {boolean} [limited]  Whether a tolerance may be too large to compare.
 *
 * @typedef {object} Verdict
 * @property {"passed" | "failed" | "unusable"} status
 * @property {number} share  The largest error, divided by the tolerance.
 * @property {string[]} problems  Reasons of failures, each with the output's name.
 * @property {string[]} unusable  Reasons that outputs are not compared, each with the output's name.
 */

/**
 * Compare the outputs of one case with its reference.
 * @param {Tensors} expected  The reference.
 * @param {Tensors} outputs  What the engine gave.
 * @param {Rules} rules
 * @returns {Verdict}
 */
export function judge(expected, outputs, { allowed, unusable, ignored_rows: ignored, limited = true }) {
  const verdict = { share: 0, problems: [], unusable: [] };
  for (const [name, reference] of Object.entries(expected)) {
    const got = outputs[name];
    const problem = got ? unlike(got, reference) : 'is missing';
    if (problem) verdict.problems.push(`${name}: ${problem}`);
    else if (Object.hasOwn(unusable, name)) verdict.unusable.push(`${name}: ${unusable[name]}`);
    else judgeValues(verdict, name, withoutRows(got, reference, ignored), reference, allowed[name], limited);
  }
  for (const name of Object.keys(outputs)) {
    if (!Object.hasOwn(expected, name)) verdict.problems.push(`unexpected output ${name}`);
  }
  const { problems, unusable: none } = verdict;
  return { ...verdict, status: problems.length ? 'failed' : none.length ? 'unusable' : 'passed' };
}

/** Returns the reason that a tolerance is too large to compare with, or "". */
export function beyondLimit(/** @type {Measures} */ allowed, /** @type {string} */ type) {
  const step = Math.max(epsOf(type), epsOf('float32'));
  for (const [part, steps, share] of LIMITS) {
    const most = Math.min(steps * step, share);
    if (allowed[part] <= most) continue; // so that NaN is too large
    const [error, limit] = [allowed[part], most].map((x) => Number(x.toPrecision(2)));
    return (
      `the tolerance over ${OVER[part]} would be ${error}, and ${limit} is the most ` +
      `for ${type}`
    );
  }
  return '';
}

/** An output with the reference in the rows of the batch that are not compared. */
function withoutRows(got, reference, rows) {
  if (rows.length === 0 || reference.dims.length === 0) return got;
  const data = got.data.slice();
  const size = data.length / reference.dims[0];
  for (const row of rows) {
    data.set(reference.data.subarray(row * size, (row + 1) * size), row * size);
  }
  return { ...got, data };
}

/** In what a tensor differs from another but its values, or "". */
function unlike(got, reference) {
  if (got.type !== reference.type) return `dtype is ${got.type}, expected ${reference.type}`;
  const same = got.dims.length === reference.dims.length && got.dims.every((d, i) => d === reference.dims[i]);
  return same ? '' : `shape is [${got.dims}], expected [${reference.dims}]`;
}

function judgeValues(verdict, name, got, reference, allowed, limited) {
  if (!isFloating(reference.type)) {
    const wrong = places(got.data, reference.data, (r, t) => r !== t);
    if (wrong) verdict.problems.push(`${name}: ${wrong(reference.dims)}`);
    return;
  }
  const r = widen(got);
  const t = widen(reference);
  const width = reference.dims.at(-1) ?? 1;
  const problem = nonfiniteProblem(r, t, reference.dims) || zeroRowProblem(r, t, width, reference.dims);
  if (problem) {
    verdict.problems.push(`${name}: ${problem}`);
    return;
  }
  if (!allowed) {
    verdict.problems.push(`${name}: the stored test cases give no tolerance`);
    return;
  }
  const beyond = limited ? beyondLimit(allowed, reference.type) : '';
  if (beyond) {
    verdict.unusable.push(`${name}: ${beyond}`);
    return;
  }
  if (sizeOf(reference.dims) === 0) return;
  const found = measure(r, t, width);
  verdict.share = Math.max(verdict.share, found.whole / allowed.whole, found.row / allowed.row);
  for (const [part, over] of Object.entries(OVER)) {
    if (found[part] <= allowed[part]) continue; // so that NaN fails
    const [error, limit] = [found[part], allowed[part]].map((x) => x.toExponential(2));
    verdict.problems.push(`${name}: relative error ${error} over ${over}, tolerance ${limit}`);
    return;
  }
}

/**
 * Relative L2 distances where both are finite.
 * @param {Float64Array} r
 * @param {Float64Array} t
 * @param {number} width  Elements of a row.
 * @returns {Measures}
 */
export function measure(r, t, width) {
  // Squares of float64 overflow or vanish; of shares of the largest element they do not.
  let largest = 0;
  for (let i = 0; i < t.length; i++) {
    if (usable(r[i], t[i])) largest = Math.max(largest, Math.abs(t[i]));
  }
  if (largest === 0) return { whole: 0, row: 0 };
  let [allReference, allError, row] = [0, 0, 0];
  for (let start = 0; start < t.length; start += width) {
    let [reference, error] = [0, 0];
    for (let i = start; i < start + width; i++) {
      if (!usable(r[i], t[i])) continue;
      reference += (t[i] / largest) ** 2;
      error += (r[i] / largest - t[i] / largest) ** 2;
    }
    if (reference > 0) row = Math.max(row, error / reference);
    allReference += reference;
    allError += error;
  }
  return { whole: Math.sqrt(allError / allReference), row: Math.sqrt(row) };
}

const usable = (r, t) => Number.isFinite(r) && Number.isFinite(t);

function nonfiniteProblem(r, t, dims) {
  const kinds = { NaN: Number.isNaN, '+Inf': (x) => x === Infinity, '-Inf': (x) => x === -Infinity };
  for (const [kind, is] of Object.entries(kinds)) {
    const wrong = places(r, t, (a, b) => is(a) !== is(b));
    if (wrong) return `${kind} in other places than in the reference; ${wrong(dims)}`;
  }
  return '';
}

function zeroRowProblem(r, t, width, dims) {
  const inZeroRow = new Uint8Array(t.length);
  for (let start = 0; start < t.length; start += width) {
    const row = t.subarray(start, start + width);
    // Both are infinite at the same elements by now: these count as 0 here.
    if (row.every((x) => x === 0 || !Number.isFinite(x))) inZeroRow.fill(1, start, start + width);
  }
  const wrong = places(r, t, (a, b, i) => inZeroRow[i] === 1 && Number.isFinite(b) && a !== 0);
  return wrong ? `a row that must be 0 is not; ${wrong(dims)}` : '';
}

/** Says how many elements are wrong, and the first of them; null where none is. */
function places(got, reference, isWrong) {
  let count = 0;
  let first = -1;
  for (let i = 0; i < reference.length; i++) {
    if (!isWrong(got[i], reference[i], i)) continue;
    if (count++ === 0) first = i;
  }
  if (count === 0) return null;
  return (dims) =>
    `${count} of ${reference.length} elements, the first at [${indexOf(first, dims)}]: ` +
    `actual ${short(got[first])}, expected ${short(reference[first])}`;
}

const short = (x) => (typeof x === 'bigint' ? `${x}` : `${Number(x.toPrecision(6))}`);

function indexOf(flat, dims) {
  const index = [];
  for (const size of [...dims].reverse()) {
    index.unshift(flat % size);
    flat = Math.floor(flat / size);
  }
  return index;
}
