/** The part of the page that continues a prompt, and says how fast. */

import { generate, idsOf, spaced } from './lib/generation.mjs';
import { oneLine } from './lib/text.mjs';
import { openTexts } from './lib/tokenizer.mjs';

const byId = (/** @type {string} */ id) => document.getElementById(id);
const form = byId('prompt-form');

/** The longest time without a picture of what came, in milliseconds. */
const BLIND = 50;

let submitted = () => {};

form.addEventListener('submit', (event) => {
  event.preventDefault();
  submitted();
});

/** Hide the form; `offer` returns. */
export function withdraw() {
  byId('generator').hidden = true;
  submitted();
}

/**
 * Show the form, and continue prompts until `withdraw` is called.
 * @param {import('./lib/model.mjs').Model} model
 * @param {import('./lib/bundle.mjs').Bundle} bundle  Of a whole model.
 * @param {() => boolean} current  Whether the page still shows this bundle.
 */
export async function offer(model, bundle, current) {
  const [generates, kinds] = [form.querySelector('button'), form.elements['prompt-is']];
  for (const choice of kinds) choice.disabled = choice.value === 'text' && !bundle.ids.text;
  if (!bundle.ids.text) kinds.value = 'ids';
  byId('generated').textContent = byId('generation-says').textContent = '';
  byId('generator').hidden = false;
  for (;;) {
    await new Promise((resolve) => (submitted = resolve));
    if (!current()) return;
    let stopped = false;
    submitted = () => (stopped = true);
    generates.textContent = 'Stop';
    await continuePrompt(model, bundle, () => current() && !stopped);
    generates.textContent = 'Generate';
  }
}

async function continuePrompt(model, bundle, goesOn) {
  const [output, says] = [byId('generated'), byId('generation-says')];
  output.textContent = '';
  says.textContent = 'Generating …';
  const [prompt, count] = [byId('prompt').value, Number(byId('most-tokens').value)];
  try {
    const texts = form.elements['prompt-is'].value === 'text' ? await openTexts(bundle) : null;
    const ids = texts ? texts.encode(prompt) : idsOf(prompt);
    const times = [performance.now()];
    const tokens = timed(generate(model, bundle, ids, count), times, goesOn);
    for await (const piece of texts ? texts.decode(ids, tokens) : spaced(tokens)) output.append(piece);
    says.textContent = speedOf(times);
  } catch (error) {
    says.textContent = `Cannot generate: ${oneLine(error)}`;
  }
}

/** The tokens, with the time of each, while `goesOn`. */
async function* timed(tokens, times, goesOn) {
  let seen = times[0];
  for await (const token of tokens) {
    times.push(performance.now());
    yield token;
    if (!goesOn()) return;
    if (performance.now() - seen < BLIND) continue;
    byId('generation-says').textContent = speedOf(times);
    await new Promise((resolve) => setTimeout(resolve)); // the browser draws, and takes clicks
    seen = performance.now();
  }
}

function speedOf(times) {
  const [started, first, last] = [times[0], times[1], times.at(-1)];
  const count = times.length - 1;
  const rate = count > 1 ? `, then ${((count - 1) / ((last - first) / 1000)).toFixed(1)} tokens/s` : '';
  return `${count} token${count === 1 ? '' : 's'}: the first after ${(first - started).toFixed(0)} ms${rate}`;
}
