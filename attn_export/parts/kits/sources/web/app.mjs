/** Script of the page: opens a bundle, runs every case, and shows each result. */

import { openBundle } from './lib/bundle.mjs';
import { check, countOf } from './lib/check.mjs';
import { decodeTokens } from './lib/decode_example.mjs';
import { oneLine } from './lib/text.mjs';
import { load, unavailable } from './engine.mjs';
import { offer, withdraw } from './generator.mjs';
import { addWeights, clearWeights } from './heat_map.mjs';
import { chosenFiles, droppedFiles, filesSource, served } from './sources.mjs';
import { clear, showFacts, showProgress, showResult, showState } from './view.mjs';

/** Dialects, the preferred one first: WebGPU computes contrib operators wrong and lacks Attention. */
const DIALECTS = ['portable', 'standard', 'ort'];
const TOKENS = 32;
const NAMES = { wasm: 'WebAssembly', webgpu: 'WebGPU' };

const controls = document.getElementById('controls');
let source = { read: served('bundle'), settings: () => kitSettings() };
let turn = 0;

/** Run the bundle. A later call stops an earlier one. */
async function run() {
  const mine = ++turn;
  const kind = new FormData(controls).get('engine');
  clear();
  clearWeights();
  withdraw();
  showState('running', `Loading the bundle into ${NAMES[kind]} …`);
  let model;
  try {
    const bundle = await openBundle(source.read, DIALECTS, await source.settings());
    const missing = await unavailable(kind);
    if (missing) throw new Error(missing);
    const loaded = await load(kind, source.read, bundle.graph.file);
    model = loaded.model;
    if (mine !== turn) return;
    const facts = factsOf(bundle, kind, loaded.facts);
    showFacts(facts);
    await runCases(model, bundle, () => mine === turn);
    if (mine === turn) showFacts({ ...facts, Decoding: await decoding(model, bundle) });
    if (mine === turn && bundle.ids) await offer(model, bundle, () => mine === turn);
  } catch (error) {
    if (mine === turn) showState('error', `Cannot be run: ${oneLine(error)}`);
  } finally {
    await model?.close().catch(() => {});
  }
}

async function runCases(model, bundle, current) {
  const all = countOf(bundle);
  let [done, failed] = [0, 0];
  showState('running', `Running ${all} cases …`);
  // The browser draws the page while a case waits for its files.
  for await (const result of check(model, bundle)) {
    if (!current()) return;
    showResult(result);
    addWeights(result);
    showProgress(++done, all);
    if (result.status !== 'passed') failed++;
  }
  if (failed) showState('failed', `✗ Failed: ${failed} of ${all} cases. The table says why.`);
  else showState('passed', `✓ Passed: all ${all} cases.`);
}

/** Measure the speed of decoding, which is no part of the verdict. */
async function decoding(model, bundle) {
  if (bundle.cache === 'none') return 'no cache to decode with';
  const { each } = await decodeTokens(model, bundle, TOKENS);
  return `${each.toFixed(2)} ms per token (${TOKENS} tokens)`;
}

const factsOf = (bundle, kind, { version, device, threads }) => ({
  Bundle: bundle.name,
  Graph: `${bundle.graph.file} (${bundle.graph.dialect})`,
  Engine: `onnxruntime-web ${version}, ${NAMES[kind]}`,
  'Computed on': device === 'cpu' ? `CPU, ${threads} thread${threads === 1 ? '' : 's'}` : device,
});

/** The settings of this kit. */
async function kitSettings() {
  const response = await fetch('kit.json');
  if (!response.ok) throw new Error(`kit.json: ${response.status} ${response.statusText}`);
  return response.json();
}

function open(files) {
  if (files.size === 0) return;
  source = { read: filesSource(files), settings: () => ({}) };
  run();
}

controls.addEventListener('submit', (event) => {
  event.preventDefault();
  run();
});
for (const choice of controls.elements.engine) choice.addEventListener('change', run);
const folder = document.getElementById('folder');
folder.addEventListener('change', () => open(chosenFiles(folder.files)));
document.addEventListener('dragover', (event) => event.preventDefault());
document.addEventListener('drop', async (event) => {
  event.preventDefault();
  open(await droppedFiles(event.dataTransfer));
});

// The address of the page can choose the engine: ?engine=webgpu
const chosen = new URLSearchParams(location.search).get('engine');
if (chosen in NAMES) controls.elements.engine.value = chosen;
run();
