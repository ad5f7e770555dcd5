// Problems of a page that make it hard to read or to use, each as one line of text.
(() => {
  const found = [];
  const say = (what, element) =>
    found.push(`${what}: <${element.tagName.toLowerCase()}> ${element.textContent.trim().slice(0, 40)}`);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const seen = (element) => element.getClientRects().length > 0;

  // Headings: one first, and no level left out on the way down.
  const levels = all('h1, h2, h3, h4, h5, h6').map((heading) => Number(heading.tagName[1]));
  if (levels.filter((level) => level === 1).length !== 1 || levels[0] !== 1) found.push(`headings ${levels}`);
  levels.forEach((level, at) => at && level > levels[at - 1] + 1 && found.push(`heading ${levels[at - 1]} to ${level}`));

  for (const table of all('table')) {
    if (!table.caption?.textContent.trim()) say('a table without a caption', table);
    if (!table.querySelector('thead th[scope=col]')) say('a table without column headers', table);
    for (const row of table.tBodies[0].rows) if (!row.querySelector('th[scope=row]')) say('a row without a header', row);
    const widths = new Set([...table.rows].map((row) => row.cells.length));
    if (widths.size !== 1) say('rows of different lengths', table);
  }

  for (const image of all('svg, img')) {
    const names = (image.getAttribute('aria-labelledby') ?? '').split(' ').map((id) => document.getElementById(id));
    if (image.getAttribute('role') !== 'img' || !names.every((name) => name?.textContent.trim())) say('an image without a name', image);
  }
  const ids = all('[id]').map((element) => element.id);
  if (new Set(ids).size !== ids.length) found.push(`an id twice: ${ids.filter((id, at) => ids.indexOf(id) !== at)}`);

  // Content that is wider than its place scrolls, can be focused and has a name.
  for (const element of all('body *')) {
    if (!seen(element) || element.scrollWidth <= element.clientWidth + 1 || element.clientWidth <= 1) continue;
    if (getComputedStyle(element).overflowX !== 'auto') continue;
    if (element.tabIndex !== 0) say('a wide region that keys do not reach', element);
    if (element.getAttribute('role') !== 'region' || !element.getAttribute('aria-labelledby')) say('a wide region without a name', element);
  }
  return found;
})()
