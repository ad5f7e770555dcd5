/** In the page: takes requests from `serve_web.mjs`, runs them, posts what comes out. */

import { Reader, answer, failure, loaded, readRequest } from './lib/frames.mjs';
import { load } from './engine.mjs';

async function main({ kind, threads, graph }) {
  fetch('alive').catch(() => {}); // its end tells the other side that this page has died
  let model;
  try {
    const engine = await load(kind, read, graph, { threads: Number(threads) });
    model = engine.model;
    await post(loaded({ ...engine.facts, browser: browserName() }));
  } catch (error) {
    await post(failure(error));
    return;
  }
  for (;;) {
    const bytes = new Uint8Array(await (await fetch('next')).arrayBuffer());
    const { inputs, bound } = await readRequest(new Reader([bytes]));
    await post(await model.run(inputs, bound).then(answer, failure));
  }
}

async function read(path) {
  const response = await fetch(`graph/${encodeURIComponent(path)}`);
  if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
  return new Uint8Array(await response.arrayBuffer());
}

const post = (body) => fetch('answer', { method: 'POST', body });

const browserName = () => navigator.userAgent.match(/Chrom\w+\/[\d.]+/)?.[0] ?? 'unknown';

main(Object.fromEntries(new URLSearchParams(location.search))).catch((error) =>
  post(failure(error)),
);
