// Formulas: TeX of a model becomes MathML by Temml (vendor/), which is fetched with the first formula. What
// a model writes sets no address, no name and no style of an element. Knows TeX and elements.

const MOST = 4_000; // characters of a formula; a longer one stays TeX
const OPTIONS = { trust: false, throwOnError: true, maxExpand: 300, maxSize: [20, 300] };
const ALLOWED = new Set([
  'accent', 'accentunder', 'class', 'columnalign', 'columnlines', 'columnspacing', 'depth', 'display', 'displaystyle',
  'fence', 'form', 'height', 'linethickness', 'lspace', 'mathbackground', 'mathcolor', 'mathsize', 'mathvariant',
  'maxsize', 'minsize', 'movablelimits', 'notation', 'rowlines', 'rowspacing', 'rspace', 'scriptlevel', 'separator',
  'stretchy', 'symmetric', 'voffset', 'width',
]);

let loading = null;

/** Temml is a plain script, and no module. */
function load() {
  loading ??= new Promise((resolve, reject) => {
    const script = document.createElement('script');
    script.src = new URL('vendor/temml.js', import.meta.url).href;
    script.onload = () => resolve(window.temml);
    script.onerror = () => { loading = null; reject(new Error('temml.js was not loaded')); };
    document.head.append(script);
  });
  return loading;
}

/** Draws the formulas below an element: each `code.math` holds TeX, and stays where it is none. */
export async function drawFormulas(element) {
  const formulas = [...element.querySelectorAll('code.math')].filter(({ textContent }) => textContent.length <= MOST);
  if (!formulas.length) return;
  let temml;
  try {
    temml = await load();
  } catch (error) {
    console.info(error.message);
    return;
  }
  for (const code of formulas) {
    const math = formula(temml, code.textContent, code.classList.contains('display'));
    if (math) code.replaceWith(math);
  }
}

function formula(temml, tex, displayMode) {
  try {
    const tree = temml.__renderToMathMLTree(tex, { ...OPTIONS, displayMode });
    strip(tree);
    const math = tree.toNode();
    if (!displayMode) return math;
    const box = document.createElement('div');
    box.className = 'scroller formula';
    box.tabIndex = 0;
    box.setAttribute('role', 'group');
    box.setAttribute('aria-label', 'Formula');
    box.append(math);
    return box;
  } catch {
    return null; // no TeX, or more than the bounds allow
  }
}

function strip(node) {
  for (const name of Object.keys(node.attributes ?? {})) if (!ALLOWED.has(name)) delete node.attributes[name];
  if ('href' in node) node.href = undefined;
  node.children?.forEach(strip);
}
