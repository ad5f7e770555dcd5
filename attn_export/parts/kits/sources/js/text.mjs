/** Texts for a terminal or a page without control characters, which names in files may have. */

const MOST = 300;

/** A name or message as one line of at most 300 characters. */
export const printable = (/** @type {unknown} */ text) =>
  `${text}`.replace(/\s+/g, ' ').replace(/[\p{C}\p{Zl}\p{Zp}]/gu, '?').trim().slice(0, MOST);

/** The message of an error as one line. */
export const oneLine = (/** @type {unknown} */ error) => printable(error?.message ?? error);

/** A text of several lines without other control characters. */
export const printableLines = (/** @type {string} */ text) =>
  text.replace(/(?![\n\t])[\p{C}\p{Zl}\p{Zp}]/gu, '?');
