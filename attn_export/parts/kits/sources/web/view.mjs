/** Display of a run: a summary, facts, and a row for each case. */

const byId = (/** @type {string} */ id) => document.getElementById(id);

/** @typedef {"running" | "passed" | "failed" | "error"} State */

/**
 * Show the state of the run, which screen readers announce.
 * @param {State} state
 * @param {string} text
 */
export function showState(state, text) {
  document.body.dataset.state = state;
  byId('verdict').textContent = text;
}

/** Clear the results of the last run. */
export function clear() {
  for (const group of [...byId('cases').tBodies]) group.remove();
  byId('facts').replaceChildren();
  showProgress(0, 1);
}

/** Show the progress of the run. */
export function showProgress(/** @type {number} */ done, /** @type {number} */ all) {
  Object.assign(byId('progress'), { max: all, value: done });
}

/** Show facts about the bundle and the engine. */
export function showFacts(/** @type {Record<string, unknown>} */ facts) {
  const pairs = Object.entries(facts).map(([name, value]) => {
    const pair = element('div');
    pair.append(element('dt', name), element('dd', `${value}`));
    return pair;
  });
  byId('facts').replaceChildren(...pairs);
}

/** Add a case to the table: a row of figures, and a row with its purpose and its problems. */
export function showResult(/** @type {import('./lib/check.mjs').Result} */ result) {
  const { name, about, status, share, why, milliseconds } = result;
  const passed = status === 'passed';
  const head = element('th', name);
  head.scope = 'rowgroup';
  const figures = element('tr');
  figures.append(
    head,
    element('td', `${passed ? '✓' : '✗'} ${status}`, passed ? 'passed' : 'failed'),
    element('td', figure(share), 'number'),
    element('td', milliseconds.toFixed(1), 'number'),
  );
  const said = element('td');
  said.colSpan = figures.children.length;
  said.append(element('p', about, 'about'));
  if (why) said.append(element('p', why, 'why'));
  const words = element('tr');
  words.append(said);
  const group = element('tbody');
  group.append(figures, words);
  byId('cases').append(group);
}

/** Format a number: 0.123, or 1.2e+4 if it is large. */
function figure(share) {
  if (!Number.isFinite(share)) return '–';
  return share < 1000 ? share.toFixed(3) : share.toExponential(1);
}

/** An element with a text. */
export function element(/** @type {string} */ tag, text = '', className = '') {
  const made = document.createElement(tag);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}
