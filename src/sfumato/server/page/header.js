// The page's header on small screens: scrolling down puts it away, scrolling up brings it back; and
// the note below it, which a person can dismiss. Knows neither views nor the server.

import { loadDismissed, saveDismissed } from './store.js';

const JITTER = 12; // pixels of a scroll that mean nothing

/** The style sheet decides on which screens `tucked` has an effect. */
export function tuckOnScroll(header) {
  let last = scrollY;
  const show = (isTucked) => header.classList.toggle('tucked', isTucked);
  addEventListener('scroll', () => {
    if (Math.abs(scrollY - last) < JITTER) return;
    show(scrollY > last && scrollY > header.offsetHeight && !header.contains(document.activeElement));
    last = scrollY;
  }, { passive: true });
  header.addEventListener('focusin', () => show(false));
  addEventListener('hashchange', () => show(false));
}

/** A note that stays away once it was dismissed, until it says something else. */
export class Banner {
  constructor(element) {
    this.element = element;
    this.text = element.querySelector('span');
    element.querySelector('button').addEventListener('click', () => {
      saveDismissed(this.text.textContent);
      element.hidden = true;
    });
  }

  say(text) {
    this.text.textContent = text;
    this.element.hidden = !text || loadDismissed() === text;
  }
}
