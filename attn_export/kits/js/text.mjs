/** Texts for a terminal or a page: names come from files, and may hold what moves a cursor. */

const MOST = 300;

/** A name or message as one line of at most 300 characters. */
export const printable = (/** @type {unknown} */ text) =>
  `${text}`.replace(/\s+/g, ' ').replace(/[\p{C}\p{Zl}\p{Zp}]/gu, '?').trim().slice(0, MOST);

/** What an error says, as one line. */
export const oneLine = (/** @type {unknown} */ error) => printable(error?.message ?? error);
