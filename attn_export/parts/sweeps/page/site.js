
'use strict';
(() => {
  const get = (id) => document.getElementById(id);
  const table = document.querySelector('table.site');
  const rows = [...table.tBodies[0].rows];
  const controls = ['search', 'target', 'verdict'].map(get);
  const older = get('older');

  /** Show the rows that fit, and of the runtimes the one that is chosen, or the newest releases. */
  const filter = () => {
    const [words, target, verdict] = controls.map((control) => control.value.toLowerCase());
    for (const cell of table.querySelectorAll('[data-runtime]')) {
      const tooOld = 'older' in cell.dataset && !older.checked;
      cell.hidden = target === '' ? tooOld : cell.dataset.runtime.toLowerCase() !== target;
    }
    let count = 0;
    for (const row of rows) {
      const shown = [...row.cells].filter((cell) => !cell.hidden);
      const text = row.textContent.toLowerCase();
      const fits =
        words.split(/\s+/).every((word) => text.includes(word)) &&
        (verdict === '' || shown.some((cell) => cell.dataset.verdict === verdict));
      row.hidden = !fits;
      count += fits ? 1 : 0;
    }
    get('count').textContent = `${count} of ${rows.length} rows`;
  };

  for (const control of [...controls, older].filter(Boolean)) control.addEventListener('input', filter);
  get('filters').addEventListener('submit', (event) => event.preventDefault());
  get('filters').hidden = false;
  filter();
})();
