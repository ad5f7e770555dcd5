/** A picture of the attention weights of one head: a row for each query, a column for each key. */

import { widen } from './lib/dtypes.mjs';

const OUTPUT = 'attn_weights';

// The brightness rises in even steps, so that the picture is readable without colours.
const RAMP = [[68, 1, 84], [59, 82, 139], [33, 145, 140], [94, 201, 98], [253, 231, 37]];

/** Colour of weights that are exactly 0, as those of masked keys, unlike small ones. */
const NONE = [128, 128, 128];

const byId = (/** @type {string} */ id) => document.getElementById(id);
const CHOICES = ['case', 'batch', 'head', 'query', 'key'].map((name) => byId(`weights-${name}`));
const [caseOf, batchOf, headOf, queryOf, keyOf] = CHOICES;

/** @type {Map<string, {dims: number[], values: Float64Array, rows: number[]}>} */
const held = new Map();

/** Remove the weights of the last run. */
export function clearWeights() {
  held.clear();
  caseOf.replaceChildren();
  byId('weights').hidden = true;
}

/** Add the weights of a case, if it has any. The first case with several queries is displayed. */
export function addWeights(/** @type {import('./lib/check.mjs').Result} */ { name, outputs, ignored }) {
  const weights = outputs[OUTPUT];
  if (weights?.dims.length !== 4 || weights.dims.includes(0)) return;
  // Batch elements that are not compared are not shown, because their values have no meaning.
  const rows = count(weights.dims[0]).filter((row) => !ignored.includes(row));
  if (rows.length === 0) return;
  held.set(name, { dims: weights.dims, values: widen(weights), rows });
  caseOf.append(new Option(name, name));
  byId('weights').hidden = false;
  const [shown, added] = [held.get(caseOf.value), weights].map(({ dims }) => dims[2]);
  if (held.size > 1 && (shown > 1 || added === 1)) return;
  caseOf.value = name;
  chooseCase();
}

function chooseCase() {
  const { dims, rows } = held.get(caseOf.value);
  const [, heads, queries, keys] = dims;
  number(batchOf, rows);
  number(headOf, count(heads));
  limit(queryOf, queries);
  limit(keyOf, keys);
  draw();
}

const count = (/** @type {number} */ length) => Array.from({ length }, (_, i) => i);

function number(select, choices) {
  select.replaceChildren(...choices.map((i) => new Option(`${i}`, `${i}`)));
}

function limit(input, size) {
  input.max = size - 1;
  input.value = Math.max(0, Math.min(Math.trunc(Number(input.value)) || 0, size - 1));
}

function draw() {
  const { dims, values } = held.get(caseOf.value);
  const [, heads, queries, keys] = dims;
  const start = (Number(batchOf.value) * heads + Number(headOf.value)) * queries * keys;
  const weights = values.subarray(start, start + queries * keys);
  limit(queryOf, queries);
  limit(keyOf, keys);
  const [query, key] = [Number(queryOf.value), Number(keyOf.value)];
  const most = weights.reduce((a, b) => (b > a ? b : a), 0);
  paint(weights, queries, keys, most, { query, key });
  describe(weights, queries, keys, most);
  byId('weights-value').textContent = weights[query * keys + key].toPrecision(4);
}

/** Draw the weights as cells of several pixels, with a frame around the chosen cell. */
function paint(weights, queries, keys, most, chosen) {
  const canvas = byId('heat-map');
  const cell = Math.max(4, Math.min(24, Math.floor(720 / Math.max(queries, keys))));
  Object.assign(canvas, { width: keys * cell, height: queries * cell });
  const context = canvas.getContext('2d');
  weights.forEach((weight, i) => {
    context.fillStyle = `rgb(${weight === 0 ? NONE : colour(weight / most)})`;
    context.fillRect((i % keys) * cell, Math.floor(i / keys) * cell, cell, cell);
  });
  for (const [inset, ink] of [[0, '#000'], [1, '#fff']]) {
    context.strokeStyle = ink;
    const [x, y] = [chosen.key * cell + inset + 0.5, chosen.query * cell + inset + 0.5];
    context.strokeRect(x, y, cell - 2 * inset - 1, cell - 2 * inset - 1);
  }
}

function colour(share) {
  const at = Math.min(Math.max(share, 0), 1) * (RAMP.length - 1);
  const low = Math.min(Math.floor(at), RAMP.length - 2);
  return RAMP[low].map((from, i) => Math.round(from + (RAMP[low + 1][i] - from) * (at - low)));
}

function describe(weights, queries, keys, most) {
  const at = weights.indexOf(most);
  const text =
    `Head ${headOf.value}: ${queries} queries (down) by ${keys} keys (across); the largest weight, ` +
    `${most.toPrecision(4)}, is of query ${Math.floor(at / keys)} for key ${at % keys}.`;
  byId('heat-map').setAttribute('aria-label', text);
  byId('heat-map-says').textContent = text;
  byId('heat-map-most').textContent = most.toPrecision(2);
}

/** Choose the cell under the pointer. */
function choosePointed({ offsetX, offsetY, target }) {
  const [, , queries, keys] = held.get(caseOf.value).dims;
  queryOf.value = Math.floor((offsetY / target.clientHeight) * queries);
  keyOf.value = Math.floor((offsetX / target.clientWidth) * keys);
  draw();
}

caseOf.addEventListener('change', chooseCase);
for (const choice of [batchOf, headOf, queryOf, keyOf]) choice.addEventListener('change', draw);
byId('heat-map').addEventListener('click', choosePointed);
