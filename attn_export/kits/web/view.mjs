/** What the page shows of a run: summary, facts, one row for each case. */

const byId = (/** @type {string} */ id) => document.getElementById(id);

/** @typedef {"running" | "passed" | "failed" | "error"} State */

/**
 * Show how it stands; screen readers say it.
 * @param {State} state
 * @param {string} text
 */
export function showState(state, text) {
  document.body.dataset.state = state;
  byId('verdict').textContent = text;
}

/** Forget the last run. */
export function clear() {
  for (const group of [...byId('cases').tBodies]) group.remove();
  byId('facts').replaceChildren();
  showProgress(0, 1);
}

/** Show how far it is. */
export function showProgress(/** @type {number} */ done, /** @type {number} */ all) {
  Object.assign(byId('progress'), { max: all, value: done });
}

/** Show what is known of the bundle and the engine. */
export function showFacts(/** @type {Record<string, unknown>} */ facts) {
  const pairs = Object.entries(facts).map(([name, value]) => {
    const pair = element('div');
    pair.append(element('dt', name), element('dd', `${value}`));
    return pair;
  });
  byId('facts').replaceChildren(...pairs);
}

/** Add a case to the table: a row of figures, and below it what there is to say. */
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

/** 0.123, or 1.2e+4 of what is large. */
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
