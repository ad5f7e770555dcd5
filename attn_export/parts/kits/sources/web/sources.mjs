/** Sources of bundles: the folder beside this page, or files that the user chose. */

/** @typedef {import('./lib/bundle.mjs').Read} Read */

/**
 * Files beside this page.
 * @param {string} folder
 * @returns {Read}
 */
export const served = (folder) => async (path) => {
  const url = new URL(`${folder}/${path.split('/').map(encodeURIComponent).join('/')}`, import.meta.url);
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
  return new Uint8Array(await response.arrayBuffer());
};

/**
 * Files that the user chose or dropped. Paths are relative to the folder of the manifest.
 * @param {Map<string, File>} files  By path.
 * @returns {Read}
 */
export function filesSource(files) {
  const manifests = [...files.keys()].filter((path) => /(^|\/)manifest\.json$/.test(path));
  manifests.sort((a, b) => a.length - b.length);
  const root = (manifests[0] ?? '').slice(0, -'manifest.json'.length);
  return async (path) => {
    const file = files.get(root + path);
    if (!file) throw new Error('it is not among the files; give the whole folder of a bundle');
    return new Uint8Array(await file.arrayBuffer());
  };
}

/** The files of a chosen folder, by path. */
export const chosenFiles = (/** @type {FileList} */ list) =>
  new Map([...list].map((file) => [file.webkitRelativePath || file.name, file]));

/**
 * The dropped files, including those in folders, by path.
 * @param {DataTransfer} transfer
 * @returns {Promise<Map<string, File>>}
 */
export async function droppedFiles(transfer) {
  // All entries must be taken before the first await, after which the transfer is empty.
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  const files = new Map();
  await Promise.all(entries.map((entry) => collect(entry, files)));
  return files;
}

async function collect(entry, files) {
  if (entry.isFile) {
    const file = await new Promise((resolve, reject) => entry.file(resolve, reject));
    files.set(entry.fullPath, file);
    return;
  }
  const reader = entry.createReader();
  for (;;) {
    // Each call returns some entries, and none at the end.
    const some = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (some.length === 0) return;
    await Promise.all(some.map((inner) => collect(inner, files)));
  }
}
