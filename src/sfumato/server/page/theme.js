// Dark or light, before the first paint: a plain script in the head, since a module comes too late.
// What was chosen wins over what the system prefers. main.js turns the switch with `setTheme`.
'use strict';

(() => {
  const NAME = 'sfumato.theme';
  const system = matchMedia('(prefers-color-scheme: light)');
  const stored = () => { try { return localStorage.getItem(NAME); } catch { return null; } };
  const show = (theme) => { document.documentElement.dataset.theme = theme; };
  const preferred = () => stored() ?? (system.matches ? 'light' : 'dark');

  show(preferred());
  system.addEventListener('change', () => show(preferred()));
  window.setTheme = (theme) => {
    try { localStorage.setItem(NAME, theme); } catch { /* then for this page alone */ }
    show(theme);
  };
})();
