// The texts of the page whose contrast with what is behind them is below 4.5 : 1 (WCAG 2.2, 1.4.3).
(() => {
  const rgba = (text) => text.match(/[\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((v) => {
      const s = v / 255;
      return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const colour = (element) => getComputedStyle(element).color;
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const [r, g, b, a = 1] = rgba(getComputedStyle(at).backgroundColor);
      if (a === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const low = [];
  for (const element of document.querySelectorAll('body *')) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!own || element.getClientRects().length === 0) continue;
    const [text, back] = [rgba(colour(element)), behind(element)].map(luminance);
    const ratio = (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
    if (ratio < 4.5) low.push(`${element.tagName} "${element.textContent.trim().slice(0, 30)}" ${ratio}`);
  }
  return low;
})()
