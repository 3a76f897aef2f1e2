// Making elements. Text only ever goes in as text nodes, so nothing that a model or a person wrote
// can become markup. Knows no chat.

/** An element: `attributes` (class, aria-…, data-…; `on` holds listeners; false leaves one out). */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'on') {
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    } else if (value !== false && value !== null && value !== undefined) {
      node.setAttribute(name, value === true ? '' : String(value));
    }
  }
  node.append(...children);
  return node;
}

/** A button of text that never submits a form. */
export function button(label, onClick, attributes = {}) {
  return el('button', { type: 'button', class: 'quiet', on: { click: onClick }, ...attributes }, label);
}

const SVG = 'http://www.w3.org/2000/svg';

/** An SVG element. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

/** Whether the person asked for less motion. */
export const isCalm = () => matchMedia('(prefers-reduced-motion: reduce)').matches;

/** A name that nothing else has. */
export const newId = () => `${Date.now().toString(36)}-${Math.random().toString(36).slice(2)}`;
